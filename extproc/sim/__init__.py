"""Simulated engines: HTTP servers that look and behave like vLLM, TensorRT-LLM or SGLang under load, without a GPU.

Serving needs the extra `demo` (httptools); `extproc.sim.fleet.SimFleet` runs engines inside a test.
"""
