"""Rules of rollouts: who gets which version, what a canary is judged by, how a rollout goes on. No I/O, no clock."""
