"""`python -m extproc.sim`: the simulated engines by themselves."""

import argparse
import sys

from extproc.sim.server import add_arguments, run


def main() -> int:
    """Read the command line and serve until stopped; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m extproc.sim", description="Simulated vLLM, TensorRT-LLM and SGLang engines."
    )
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
