from __future__ import annotations

import ml_dtypes
import numpy as np
import xxhash

from headrace.wire import manifest_digest, tensor_checksum, tensor_info


def test_a_checksum_is_over_the_bytes_in_c_order_whatever_the_strides() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert tensor_checksum(array) == xxhash.xxh3_128_hexdigest(array.tobytes())
    assert tensor_checksum(array.T) == xxhash.xxh3_128_hexdigest(array.T.tobytes())
    assert tensor_checksum(np.asfortranarray(array)) == tensor_checksum(array)


def test_small_floats_scalars_and_empty_tensors_have_checksums() -> None:
    for array in (np.ones(3, ml_dtypes.bfloat16), np.float32(1.5) * np.ones(()), np.empty((0, 3), np.float32)):
        assert tensor_checksum(array) == xxhash.xxh3_128_hexdigest(array.tobytes())


def test_a_digest_depends_on_every_fact_and_not_on_the_order() -> None:
    array = np.arange(6, dtype=np.float32)
    infos = [tensor_info("a", array), tensor_info("b", array)]
    digest = manifest_digest(infos)
    assert manifest_digest(reversed(infos)) == digest
    others = [
        [tensor_info("a", array)],
        [tensor_info("a", array), tensor_info("c", array)],
        [tensor_info("a", array), tensor_info("b", array + 1)],
        [tensor_info("a", array), tensor_info("b", array.reshape(2, 3))],
        [tensor_info("a", array), tensor_info("b", array.view(np.int32))],
    ]
    assert len({digest, *map(manifest_digest, others)}) == 6
