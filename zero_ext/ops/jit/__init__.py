"""Just-in-time builds of the extension modules: toolchain, nvcc, compiler jobs, cache."""
