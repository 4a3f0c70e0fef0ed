// The Python module _C_cuda: importing it runs the static registrations of the CUDA kernels. The
// ops themselves are declared by module _C.
#include <Python.h>

#if Py_LIMITED_API != 0x030a0000
#error "the wheel is tagged cp310-abi3: build with -DPy_LIMITED_API=0x030a0000"
#endif

PyMODINIT_FUNC PyInit__C_cuda() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
