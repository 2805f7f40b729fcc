"""Without the compilers of the cuda extra these tests fail at once, with the remedy."""

from importlib.util import find_spec

if find_spec("numba_cuda") is None or find_spec("cuda") is None:
    raise RuntimeError("kernels are compiled in tests: pip install -e '.[test]' has the compilers")
