// Builds one instruction set's table of attention kernels. See optimizer_kernel.h on inclusion.
#pragma once

#include "../loss/cross_entropy_kernel.h"
#include "attention_kernels.h"
#include "backward_kernel.h"
#include "forward_kernel.h"

namespace zero_ext::core {
namespace {

template <class U, class T>
constexpr AttentionKernels::OfType attention_of_type() {
  return {
      &AttentionForward<U, T>::scratch_floats,  &AttentionForward<U, T>::run,
      &AttentionBackward<U, T>::scratch_floats, &AttentionBackward<U, T>::run,
      &AttentionBackward<U, T>::run_bias,       &AttentionBackward<U, T>::write_rows,
      &CrossEntropyRows<typename U::V, T>::sum, &CrossEntropyRows<typename U::V, T>::differentiate};
}

// Half is the units of bfloat16's products.
template <class U, class Half>
constexpr AttentionKernels make_attention() {
  return {{attention_of_type<U, float>(), attention_of_type<Half, BFloat16>(),
           attention_of_type<U, Float16>()}};
}

}  // namespace
}  // namespace zero_ext::core
