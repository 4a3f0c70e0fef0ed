// Marks that let one formula compile for the host and for CUDA devices.
#pragma once

#if defined(__CUDACC__)
#define ZERO_EXT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ZERO_EXT_HOST_DEVICE inline __attribute__((always_inline))
#endif

#if defined(__CUDA_ARCH__)
#define ZERO_EXT_UNROLL _Pragma("unroll")
#else
#define ZERO_EXT_UNROLL
#endif
