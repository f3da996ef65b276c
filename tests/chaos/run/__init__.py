"""The long chaos run: a whole fleet under a steady load while its parts are killed, stopped and misled about time.

`python -m tests.chaos.run` is the command. In the order of reading: `plan` (what happens when, from a seed), `stack`
and `storage` (the processes), `faults` (does what the plan says), `load` (the clients), `judge` (what became of each
request), `report` (the figures).
"""
