"""Coverage-guided fuzzing of what engines and clients send, with atheris: one module for each kind of input.

`python -m tests.fuzz.frames -atheris_runs=50000` runs one target so many times; without the flag it runs until it is
stopped or finds a crash, whose input it then writes to a file `crash-…` in the working directory.
"""
