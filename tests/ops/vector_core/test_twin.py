"""Every rule that the twin checks: a kernel that breaks it is stopped, and the same kernel without the mistake runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.fakes.ascend_c import LIBRARY_WORKSPACE, Counts, Library, TwinError, build, run

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

PROBES = Path(__file__).parents[2] / "fakes" / "ascend_c" / "probes"
TILING = PROBES / "op_host" / "probe_tiling.h"
ALIGNED = "a UB address must be a multiple of 32 bytes"

RULES = {
    "limits": {
        "alignment": f"{ALIGNED}: the source, byte 16 of TBuf 1",
        "alignment_copy": ALIGNED,
        "alignment_brcb": ALIGNED,
        "alignment_reduction": "the destination must be a multiple of 16 bytes",
        "mask": r"mask 128 is not in 1\.\.64",
        "mask_reduction": r"mask 65 is not in 1\.\.64",
        "no_mask_reduction": r"mask 0 is not in 1\.\.64",
        "alignment_value": "the destination must be a multiple of 8 bytes",
        "repeats": "repeatTime 256 is above 255",
        "repeats_reduction": r"repeatTime 256 is not in 1\.\.255",
        "no_repeats": "repeatTime 0: the call does nothing",
        "no_repeats_reduction": r"repeatTime 0 is not in 1\.\.255",
        "no_repeats_brcb": r"repeatTime 0 is not in 1\.\.255",
        "no_blocks": "DataCopy of no bytes does nothing",
        "brcb_short": "the source has 15 elements, fewer than 8 for each of 2 repeats",
        "block_count": "blockCount 4096 is above 4095",
        "block_count_pad": r"blockCount 4096 is not in 1\.\.4095",
        "no_block_pad": r"blockCount 0 is not in 1\.\.4095",
        "no_length_pad": "blockLen 0 must be a multiple",
        "block_length": "blockLen 31 must be a multiple",
        "copy_length": "DataCopy of 8 elements: the bytes must be a multiple of 32",
        "padding": "paddings of 0 and 34 bytes: each may be 32 at most",
        "global_alignment": "a global address must be a multiple of the element's bytes",
        "int4_count": "15 elements of int4b_t: must be even",
        "rounding_mode": "RoundMode 0 is not supported for this pair of types",
        "brcb_stride": "dstBlkStride 0 is undefined",
        "brcb_in_place": "the source and the destination overlap",
        "overlap_in_part": "the source and the destination overlap in part",
        "overlap_in_part_count": "the source and the destination overlap in part",
        "overlap_of_repeats": "repeat 1 reads the source where repeat 0 wrote",
        "chain": "repeat 1 reads src0 where repeat 0 wrote",
        "chain_type": "repeat 1 reads src1 where repeat 0 wrote",
        "widened_in_place": "float sums over half sources in the same place",
        "cast_in_place": "the source and the destination overlap in part",
        "reduction_in_place": "a reduction of several repeats over its own source",
        "transpose_stride": "one repeat with strides other than 0",
        "transpose_in_place": "the source and the destination overlap",
        "capacity": "180000 bytes for TBuf 4 after 16384 make more than the 196352 that a kernel may use",
        "no_bytes": "InitBuffer of 0 bytes for TBuf 4",
        "buffers": "a kernel may have 64 buffers at most",
        "beyond_buffer": "the destination is outside its buffer TBuf 1: reaches byte 4128 of 4096",
        "beyond_buffer_repeats": "the source is outside its buffer TBuf 2: reaches byte 4192 of 4096",
        "beyond_buffer_copy": "the destination is outside its buffer TBuf 1",
        "offset_outside": "offset 2048 of a tensor of 2048 elements",
        "get_too_much": r"Get\(2049\) of TBuf 1, which has 2048",
        "to_veccalc": "not to VECCALC: TBuf 3",
        "from_veccalc": "not from VECCALC: TBuf 3",
        "no_buffer": "a LocalTensor is used that no queue or TBuf gave out",
        "second_pipe": "a second TPipe while the first one lives",
    },
    "sorting": {
        "sort_to": "a UB address must be a multiple of 256 bytes: the destination",
        "sort_from": "a UB address must be a multiple of 128 bytes: src0",
        "sort_payloads": "a UB address must be a multiple of 128 bytes: src1",
        "sort_repeats": r"repeatTime -1 is not in 0\.\.255",
        "sort_in_place": "the source and the destination overlap",
        "merge_one_list": "validBit 1 is not 3, 7 or 15",
        "merge_in_place": "the source and the destination overlap",
        "merge_unsorted": "a list that is not sorted",
        "gather_pattern": "the twin knows counter mode with pattern 1 or 2",
        "gather_in_place": "the source and the destination overlap",
        "gather_unaligned": "a UB address must be a multiple of 4 bytes: an element",
        "gather_base": "srcBaseAddr 8192 is not that of an element of the source, which has 8192 bytes",
        "gather_outside": "an element is outside its buffer TBuf 3: reaches byte 8196 of 8192",
    },
    "protocol": {
        "alloc_too_many": r"AllocTensor: all 1 buffers of the queue of queue 1 \(VECIN\) buffer 0 are out",
        "nine_out": "more than 8 tensors of the queues at one position are out",
        "enqueue_unallocated": "EnQue without AllocTensor",
        "enqueue_foreign": "EnQue of a tensor that is not this queue's",
        "depth": "already holds its depth, 1",
        "dequeue_empty": "DeQue of an empty queue",
        "used_after_free": r"the destination in queue 1 \(VECIN\) buffer 0 is used after FreeTensor",
        "used_in_queue": "is used between EnQue and DeQue",
        "freed_twice": r"FreeTensor of queue 1 \(VECIN\) buffer 0, which is free",
        "not_freed": r"end: queue 1 \(VECIN\) buffer 0 was not freed",
        "used_after_reset": "the destination in TBuf 2 is used after TPipe::Reset",
        "unwritten_ub": "reads bytes never written: the source in TBuf 2, byte 0",
        "unwritten_ub_in_part": "reads bytes never written: the source in TBuf 2, byte 254",
        "unwritten_padding": "reads bytes never written: the source in TBuf 1, byte 20",
        "unwritten_output": "reads global bytes never written: y, byte 0",
        "unwritten_workspace": "reads global bytes never written: workspace, byte 0",
        "read_outside": r"a read outside global memory: bytes 4080\.\.4112 of x, which has 4096",
        "write_outside": r"core 1, DataCopyPad out: a write outside global memory: bytes 4064\.\.4098 of y",
        "library_workspace": "a write outside",
        "absent_input": r"a read of an absent \(null\) buffer",
        "write_input": "writes into the input x",
        "same_output": "core 1, DataCopy out: writes what core 0 wrote without a SyncAll or flag between: y",
        "scalar_output": "scalar reads are for inputs only",
        "other_cores_bytes": "core 1, DataCopy in: reads what core 0 wrote without a SyncAll or flag between",
        "overwritten_while_read": "writes what another core read without a SyncAll or flag between: workspace",
        "missed_sync": "core 1 ended without the SyncAll that core 0 waits at: deadlock",
        "sync_kernel_type": "SyncAll needs KERNEL_TYPE_MIX_AIV_1_0",
        "cross_unwaited": "core 0, DataCopy in: reads global bytes never written: workspace",
        "cross_set_before_the_store": "core 0, DataCopy in: reads what core 1 wrote without a SyncAll or flag between",
        "cross_set_by_another_pipe": "core 0, DataCopy in: reads what core 1 wrote without a SyncAll or flag between",
        "cross_reported_load": "core 1, DataCopy out: writes what another core read without a SyncAll or flag between",
        "cross_missing": "core 1 waits without the cross-core flag 0 that core 0 waits at: deadlock",
        "cross_doubled": r"core 1, end: CrossCoreSetFlag\(0\) which not all cores have set",
        "cross_left": r"core 0, end: CrossCoreSetFlag\(0\) has no CrossCoreWaitFlag",
        "cross_counter": "cross-core flag 0: core 0 has not waited for 16 reports, its counter ends at 15",
        "cross_id": "cross-core flag 11: 0 to 10 and 15 are free, SyncAll takes 11 to 14",
        "cross_kernel_type": "cross-core flag 0 needs KERNEL_TYPE_MIX_AIV_1_0",
    },
    "hazards": {
        "load_then_compute": r"Muls<half>: RAW hazard on TBuf 1, bytes 0\.\.31: V runs after an unfinished MTE2",
        "compute_then_store": "RAW hazard on TBuf 2.*MTE3 runs after an unfinished V",
        "load_over_operand": "WAR hazard on TBuf 1.*MTE2 runs after an unfinished V",
        "compute_over_store": "WAR hazard on TBuf 2.*V runs after an unfinished MTE3",
        "vector_raw": r"RAW hazard.*Muls<half>\); no PipeBarrier<PIPE_V> between",
        "vector_war": "WAR hazard.*no PipeBarrier<PIPE_V> between",
        "vector_waw": "WAW hazard.*no PipeBarrier<PIPE_V> between",
        "sum_raw": "RAW hazard.*no PipeBarrier<PIPE_V> between",
        "reduction_raw": "WholeReduceSum<half>: RAW hazard",
        "brcb_raw": "Brcb<half>: RAW hazard",
        "load_twice": "WAW hazard.*no PipeBarrier<PIPE_MTE2> between",
        "scalar_read": "GetValue: RAW hazard.*S runs after an unfinished MTE2",
        "scalar_read_of_sum": "GetValue: RAW hazard.*S runs after an unfinished V",
        "scalar_write": "RAW hazard.*V runs after an unfinished S",
        "scalar_over_operand": "SetValue: WAR hazard.*S runs after an unfinished V",
        "store_twice": "WAW hazard in global memory, no PipeBarrier<PIPE_MTE3> between: y, byte 0",
        "store_then_load": "RAW hazard in global memory, no MTE3_MTE2 flag",
        "load_then_store": "WAR hazard in global memory, no MTE2_MTE3 flag",
        "wrong_flag": "RAW hazard.*V runs after an unfinished MTE2",
        "wrong_barrier": "RAW hazard.*V runs after an unfinished MTE2",
        "flag_too_early": "RAW hazard.*V runs after an unfinished MTE2",
        "flag_through_two": "RAW hazard.*MTE3 runs after an unfinished MTE2",
        "queue_guards_only_its_pipes": "GetValue: RAW hazard.*S runs after an unfinished MTE2",
        "flag_left": r"SetFlag<V_S>\(0\) has no WaitFlag",
        "wait_without_set": r"WaitFlag<V_S>\(0\) of a flag that was not set",
        "set_twice": r"SetFlag<V_S>\(0\) while that flag is still set",
        "event_id": r"event id 8 is not in 0\.\.7",
        "events_run_out": "all 8 event ids of V_S are taken",
    },
}


def probes(name: str) -> Library:
    return build(PROBES / f"{name}.cpp", TILING, "ProbeTiling", optimise="-O0")


def test_cores_that_wait_for_each_other_are_scheduled_together() -> None:
    outputs = {"y": ((2048,), torch.half)}
    given = {"x": torch.ones(2048, dtype=torch.half)}
    kernels, workspace = probes("protocol"), LIBRARY_WORKSPACE + 4096
    with pytest.raises(TwinError, match="cores that wait for each other need schedule mode 1, the host side set 0"):
        run(kernels, "sync_kernel_type_kept", given, outputs, b"", workspace, cores=2, schedule_mode=0)


def probe(library: Library, kernel: str) -> Counts:
    inputs = {"x": torch.ones(2048, dtype=torch.half)}
    outputs = {"y": ((2048,), torch.half)}
    return run(library, kernel, inputs, outputs, b"", LIBRARY_WORKSPACE + 4096, cores=2)[1]


@pytest.mark.parametrize(("file", "rule"), [(file, rule) for file, rules in RULES.items() for rule in rules])
def test_rule(file: str, rule: str) -> None:
    probe(probes(file), f"{rule}_kept")
    with pytest.raises(TwinError, match=RULES[file][rule]) as broken:
        probe(probes(file), f"{rule}_broken")
    assert re.match(rf"{rule}_broken: core \d", str(broken.value))
    assert "\n" not in str(broken.value)


@pytest.mark.parametrize("file", RULES)
def test_every_probe_is_tested(file: str) -> None:
    written = re.findall(r"^PROBE\((\w+)\)", (PROBES / f"{file}.cpp").read_text(), re.MULTILINE)
    assert written == list(RULES[file])
