// Marks that let one formula compile for the host and for CUDA devices.
#pragma once

#if defined(__CUDACC__)
#define ZERO_EXT_HOST_DEVICE __host__ __device__ __forceinline__
#define ZERO_EXT_FUNCTION __host__ __device__
#define ZERO_EXT_DEVICE __device__ __forceinline__
#else
#define ZERO_EXT_HOST_DEVICE inline __attribute__((always_inline))
#define ZERO_EXT_FUNCTION
// Of a kernel over a thread block: the device's, or the one that the tests emulate.
#define ZERO_EXT_DEVICE inline
#endif

#define ZERO_EXT_PRAGMA(text) _Pragma(#text)

// Before a loop: written out in full on devices; in groups of `count` rounds on the host, and not
// on devices, where registers are dearer than the jump; in such groups on both, so that the loads
// of several rounds are on their way together. The last one, on devices alone, takes a constant of
// a template, which GCC 12 does not.
#if defined(__CUDA_ARCH__)
#define ZERO_EXT_UNROLL _Pragma("unroll")
#define ZERO_EXT_UNROLL_BY(count) _Pragma("unroll 1")
#define ZERO_EXT_UNROLL_LOADS_BY(count) ZERO_EXT_PRAGMA(unroll count)
#define ZERO_EXT_UNROLL_DEVICE_LOADS_BY(count) ZERO_EXT_PRAGMA(unroll count)
#elif defined(__CUDACC__)
#define ZERO_EXT_UNROLL
#define ZERO_EXT_UNROLL_BY(count)
#define ZERO_EXT_UNROLL_LOADS_BY(count)
#define ZERO_EXT_UNROLL_DEVICE_LOADS_BY(count)
#else
#define ZERO_EXT_UNROLL
#define ZERO_EXT_UNROLL_BY(count) ZERO_EXT_PRAGMA(GCC unroll count)
#define ZERO_EXT_UNROLL_LOADS_BY(count) ZERO_EXT_UNROLL_BY(count)
#define ZERO_EXT_UNROLL_DEVICE_LOADS_BY(count)
#endif
