// NVIDIA's cuFile library (GPUDirect Storage), looked for at run time: blocks move between files
// and a GPU's memory without host memory of ours. Names, types and numbers are those of NVIDIA's
// cuFile API reference (docs.nvidia.com/gpudirect-storage) and CUDA driver API reference; no header
// of CUDA is needed.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "../io_file.h"
#include "io_queue.h"

namespace zero_ext::core {

// CUfileError_t: both are 0 on success.
struct CuFileStatus {
  int err = 0;     // CUfileOpError
  int cu_err = 0;  // CUresult
};

// CUfileDescr_t.
struct CuFileDescription {
  static constexpr int kDescriptor = 1;  // CU_FILE_HANDLE_TYPE_OPAQUE_FD

  int type = kDescriptor;
  union {
    int descriptor;
    void* handle;
  } file{};
  const void* file_system = nullptr;
};

// What of the libraries is used. cuFileBufRegister is not: tensors come from torch's allocator, so
// their memory changes hands without our knowing, and a registration must not outlive it. cuFile
// moves memory that is not registered through buffers of its own on the GPU.
struct CuFileCalls {
  CuFileStatus (*driver_open)() = nullptr;
  CuFileStatus (*driver_close)() = nullptr;
  CuFileStatus (*handle_register)(void** handle, CuFileDescription* description) = nullptr;
  void (*handle_deregister)(void* handle) = nullptr;
  ssize_t (*read)(void* handle, void* memory, std::size_t bytes, off_t offset,
                  off_t memory_offset) = nullptr;
  ssize_t (*write)(void* handle, const void* memory, std::size_t bytes, off_t offset,
                   off_t memory_offset) = nullptr;
  int (*context_get)(void** context) = nullptr;  // cuCtxGetCurrent
  int (*context_set)(void* context) = nullptr;   // cuCtxSetCurrent
};

// Where the libraries are looked for, in this order.
struct CuFileNames {
  std::vector<std::string> cufile = {"libcufile.so.0", "libcufile.so",
                                     "/usr/local/cuda/lib64/libcufile.so.0",
                                     "/usr/local/cuda/lib64/libcufile.so"};
  std::vector<std::string> driver = {"libcuda.so.1"};
};

// Loads both for the life of the process; cuFile has threads of its own. Throws std::runtime_error
// with the loader's reasons, or the name of what a library lacks.
CuFileCalls load_cufile(const CuFileNames& names = {});

// cuFile's driver, open as long as the object lives.
class CuFileDriver {
 public:
  // Throws std::runtime_error with both numbers of cuFile's status.
  explicit CuFileDriver(const CuFileCalls& calls);
  ~CuFileDriver();
  CuFileDriver(const CuFileDriver&) = delete;
  CuFileDriver& operator=(const CuFileDriver&) = delete;

  const CuFileCalls& calls() const { return calls_; }

 private:
  const CuFileCalls calls_;
  const pid_t process_;
  bool opened_ = false;
};

// Moves blocks of `files`, which are registered with cuFile as long as the mover lives, from and to
// memory of the GPU that is current in this thread. Throws std::runtime_error naming the path.
BlockMover cufile_mover(std::shared_ptr<CuFileDriver> driver,
                        const std::vector<std::shared_ptr<IoFile>>& files);

}  // namespace zero_ext::core
