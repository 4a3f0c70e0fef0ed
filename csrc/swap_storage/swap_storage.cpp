// The Python module _C_storage: what PyTorch's stable ABI and its Python interface lack. Built at
// first use, against the very PyTorch that it runs in, because it knows the layout of a storage.
#include <Python.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <utility>

namespace {

// Each of the two keeps its identity, and so what refers to it; bytes, allocator and size change
// hands.
void swap_memory(c10::StorageImpl& one, c10::StorageImpl& other) {
  const size_t one_nbytes = one.nbytes();
  const size_t other_nbytes = other.nbytes();
  TORCH_CHECK(one.device() == other.device(), "swap: expected storages on one device, got ",
              one.device(), " and ", other.device(), ". Move one of them.");
  TORCH_CHECK(one_nbytes == other_nbytes || one_nbytes == 0 || other_nbytes == 0,
              "swap: expected storages of equal size, or one empty, got ", one_nbytes, " and ",
              other_nbytes, " bytes. Resize one of them.");
  c10::DataPtr saved = one.set_data_ptr(c10::DataPtr());
  one.set_data_ptr_noswap(other.set_data_ptr(std::move(saved)));
  one.set_nbytes(other_nbytes);
  other.set_nbytes(one_nbytes);
  c10::Allocator* const allocator = one.allocator();
  const bool resizable = one.resizable();
  one.set_allocator(other.allocator());
  one.set_resizable(other.resizable());
  other.set_allocator(allocator);
  other.set_resizable(resizable);
}

// Takes the addresses that UntypedStorage._cdata gives.
PyObject* swap(PyObject* /*module*/, PyObject* arguments) {
  unsigned long long one = 0;
  unsigned long long other = 0;
  if (PyArg_ParseTuple(arguments, "KK", &one, &other) == 0) {
    return nullptr;
  }
  try {
    swap_memory(*reinterpret_cast<c10::StorageImpl*>(static_cast<uintptr_t>(one)),
                *reinterpret_cast<c10::StorageImpl*>(static_cast<uintptr_t>(other)));
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  return Py_NewRef(Py_None);
}

}  // namespace

PyMODINIT_FUNC PyInit__C_storage() {
  static PyMethodDef methods[] = {{"swap", swap, METH_VARARGS, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   "_C_storage",
                                   nullptr,
                                   -1,
                                   methods,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  return PyModule_Create(&definition);
}
