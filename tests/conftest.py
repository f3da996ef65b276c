"""What all tests share: one Hypothesis profile for machines of any speed."""

import os

from hypothesis import settings

# gRPC's fork handlers abort a child that is forked while another thread is inside gRPC. Tests start processes from a
# process that runs gRPC servers; the product does not. Read when grpc is imported, so it stands before everything.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# A shared machine can stall any example: how long one takes proves nothing here. What must pass before a change lands
# tries the same examples each time; on everyone else's machine they are new ones, and a failure is a finding.
settings.register_profile("warmpath", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("warmpath")
