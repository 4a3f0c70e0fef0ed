// Opens and closes a region whose functions are compiled for the named x86 target features.
#pragma once

#include "../base/host_device.h"

#if defined(__clang__)
#define ZERO_EXT_TARGET_BEGIN(features) \
  ZERO_EXT_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define ZERO_EXT_TARGET_END ZERO_EXT_PRAGMA(clang attribute pop)
#else
#define ZERO_EXT_TARGET_BEGIN(features) \
  ZERO_EXT_PRAGMA(GCC push_options) ZERO_EXT_PRAGMA(GCC target(features))
#define ZERO_EXT_TARGET_END ZERO_EXT_PRAGMA(GCC pop_options)
#endif
