"""The offline profiler: capture a model's attention over the user's data, build, measure, tune, evaluate, report."""
