"""`python -m tests.bench [names] [--quick]`: measures the budgets of the design on this machine.

Prints a table for each bench and writes `bench-results/<name>.json`. The exit code is 0 when every bench ran, whether
or not its budgets were met: a busy machine must not look like a broken program.
"""

import argparse
import gc
import sys
import time

from tests.bench import (
    decision,
    events,
    ext_proc,
    footprint,
    index,
    joining,
    keeper,
    latency,
    overload,
    precise,
    quotas,
    replay,
    rollouts,
    scaling,
    shadows,
    simulator,
    store,
    tokens,
)
from tests.bench.machine import load_average, machine
from tests.bench.report import Bench, Scale, summary, text, write

BENCHES: dict[str, Bench] = {
    "decision": decision.bench,
    "index": index.bench,
    "joining": joining.bench,
    "extproc": ext_proc.bench,
    "latency": latency.bench,
    "scaling": scaling.bench,
    "store": store.bench,
    "quotas": quotas.bench,
    "footprint": footprint.bench,
    "keeper": keeper.bench,
    "events": events.bench,
    "sim": simulator.bench,
    "replay": replay.bench,
    "tokens": tokens.bench,
    "precise": precise.bench,
    "overload": overload.bench,
    "rollouts": rollouts.bench,
    "shadows": shadows.bench,
}


def main() -> int:
    """Run what was asked for, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHES)}; all of them when none is given"
    )
    parser.add_argument("--quick", action="store_true", help="short runs: about three minutes in all")
    arguments = parser.parse_args()
    names = arguments.names or list(BENCHES)
    if unknown := [name for name in names if name not in BENCHES]:
        parser.error(f"no bench is called {unknown[0]}: choose from {', '.join(BENCHES)}")
    scale = Scale(quick=arguments.quick)
    sys.stdout.write(f"{summary(machine())}\n\n")
    for name in names:
        before, began = load_average(), time.monotonic()
        findings = BENCHES[name](scale)
        findings.notes.append(f"took {time.monotonic() - began:.0f} s{', quick' if scale.quick else ''}")
        path = write(name, scale, findings, before)
        sys.stdout.write(f"{text(name, findings, before)}        {path}\n\n")
        sys.stdout.flush()
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
