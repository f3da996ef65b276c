"""Simulated engines: HTTP servers that look and behave like vLLM 0.33 under load, without a model or a GPU.

Serving needs the extra `demo` (httptools); `extproc.sim.fleet.SimFleet` runs engines inside a test.
"""
