"""Python face of the C++ ops ``torch.ops.zero_ext.*``; importing it loads a built extension."""

from zero_ext.config.buffer_sizes import SIGN_BLOCK, sign_payload_bytes
from zero_ext.ops.attention import AttentionOptions, DropoutOptions, LayoutTensors, block_sparse_attention
from zero_ext.ops.compression.blockwise import (
    BLOCK_ELEMENTS,
    Quantized,
    block_count,
    dequantize_blockwise,
    quantize_blockwise,
)
from zero_ext.ops.compression.integer_blocks import (
    BlockFormat,
    dequantize_,
    quantize_,
    requantize_,
    sum_quantized_,
)
from zero_ext.ops.compression.sign_compression import (
    compress_1bit_,
    decompress_1bit_,
    reduce_1bit_,
    sum_1bit_,
)
from zero_ext.ops.cpu_dispatch import get_isa, set_isa
from zero_ext.ops.cross_process import (
    cross_process_abort,
    cross_process_close,
    cross_process_connect,
    cross_process_open,
    cross_process_receive,
    cross_process_send,
    cross_process_unlink,
    cross_process_wait,
)
from zero_ext.ops.device_errors import (
    DEVICE_ERROR_WORDS,
    device_error_text,
    pop_device_error_,
    raise_device_errors,
)
from zero_ext.ops.flat.flat_buffer import accumulate_, pack_, sum_shards_, unpack_
from zero_ext.ops.flat.non_finite import flag_non_finite_
from zero_ext.ops.flat.squared_norm import ACCUMULATOR_ENTRIES, squared_norm_, squared_norm_value
from zero_ext.ops.load_library import is_built, load, load_kernels
from zero_ext.ops.optimizers.adam import adam_step_
from zero_ext.ops.optimizers.adam_8bit import adam_step_8bit_
from zero_ext.ops.optimizers.lamb import lamb_norms_, lamb_step_
from zero_ext.ops.optimizers.lion import lion_step_
from zero_ext.ops.storage.aio import (
    aio_backends,
    aio_close,
    aio_close_all,
    aio_inject_fault,
    aio_open,
    aio_read_,
    aio_wait,
    aio_write_,
)
from zero_ext.ops.storage.checksum import crc32c
from zero_ext.ops.storage.huge_pages import host_buffer, host_buffer_bytes, nan_filled_host_memory
from zero_ext.ops.storage.state_stream import (
    ADAM_FIELDS,
    STREAM_COUNTERS,
    state_stream_adam_,
    state_stream_chunk_elements,
    state_stream_close,
    state_stream_extent_bytes,
    state_stream_fill_,
    state_stream_open,
    state_stream_read_,
    state_stream_write_,
)
from zero_ext.ops.storage.striped_store import (
    StoreDevice,
    StoreFacts,
    cufile_unavailable_reason,
    store_allocate,
    store_close,
    store_close_direct,
    store_facts,
    store_inject_fault,
    store_open,
    store_open_direct,
    store_read_,
    store_read_direct_,
    store_release,
    store_reserve,
    store_wait,
    store_write,
    store_write_direct,
)
from zero_ext.ops.storage.swap_storage import load_storage_swap, swap_storages_, torch_swaps_storages

__all__ = [
    "ACCUMULATOR_ENTRIES",
    "ADAM_FIELDS",
    "BLOCK_ELEMENTS",
    "DEVICE_ERROR_WORDS",
    "SIGN_BLOCK",
    "STREAM_COUNTERS",
    "AttentionOptions",
    "BlockFormat",
    "DropoutOptions",
    "LayoutTensors",
    "Quantized",
    "StoreDevice",
    "StoreFacts",
    "accumulate_",
    "adam_step_",
    "adam_step_8bit_",
    "aio_backends",
    "aio_close",
    "aio_close_all",
    "aio_inject_fault",
    "aio_open",
    "aio_read_",
    "aio_wait",
    "aio_write_",
    "block_count",
    "block_sparse_attention",
    "compress_1bit_",
    "crc32c",
    "cross_process_abort",
    "cross_process_close",
    "cross_process_connect",
    "cross_process_open",
    "cross_process_receive",
    "cross_process_send",
    "cross_process_unlink",
    "cross_process_wait",
    "cufile_unavailable_reason",
    "decompress_1bit_",
    "dequantize_",
    "dequantize_blockwise",
    "device_error_text",
    "flag_non_finite_",
    "get_isa",
    "host_buffer",
    "host_buffer_bytes",
    "lamb_norms_",
    "lamb_step_",
    "lion_step_",
    "load_kernels",
    "load_storage_swap",
    "nan_filled_host_memory",
    "pack_",
    "pop_device_error_",
    "quantize_",
    "quantize_blockwise",
    "raise_device_errors",
    "reduce_1bit_",
    "requantize_",
    "set_isa",
    "sign_payload_bytes",
    "squared_norm_",
    "squared_norm_value",
    "state_stream_adam_",
    "state_stream_chunk_elements",
    "state_stream_close",
    "state_stream_extent_bytes",
    "state_stream_fill_",
    "state_stream_open",
    "state_stream_read_",
    "state_stream_write_",
    "store_allocate",
    "store_close",
    "store_close_direct",
    "store_facts",
    "store_inject_fault",
    "store_open",
    "store_open_direct",
    "store_read_",
    "store_read_direct_",
    "store_release",
    "store_reserve",
    "store_wait",
    "store_write",
    "store_write_direct",
    "sum_1bit_",
    "sum_quantized_",
    "sum_shards_",
    "swap_storages_",
    "torch_swaps_storages",
    "unpack_",
]

if is_built():
    load()
