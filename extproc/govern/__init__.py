"""Rules of traffic: quotas, queues, breakers and time limits, as plain functions and values without I/O."""
