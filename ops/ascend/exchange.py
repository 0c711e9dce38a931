"""`Exchange` on Ascend: one operator sends rows to the dies of their experts, which get them in expert order with the
number of rows of each expert, and one sends the results back and sums them.

Both read and write the window of a communicator that nothing else may use (OT 8.5.0 and 9.1.0, documents of
aclnnMoeDistributeDispatchV3 and V4). executor/platform/ascend/exchange.py has their limits.
"""

import torch
import torch_npu
from torch import Tensor

from umbra.ops.ascend import moe
from umbra.ops.ascend.grouped import COUNTS
from umbra.ops.ascend.ops import AscendOps
from umbra.ops.ascend.weights import Bank
from umbra.ops.interface import PhysicalExperts

SENT_IN_INT8 = 2  # quant_mode: rows are rounded before they are sent, each to its own scale


class AscendExchange:
    """`group` is the name of the communicator, of which this is rank `rank` of `size`; `experts` are those of all ranks
    together. Steps of more than `most_rows` rows on a rank are not exchanged, and neither are those whose rows are few
    enough, over all ranks, for a mixture on the vector cores: that takes gathered rows."""

    uneven = False

    def __init__(self, ops: AscendOps, group: str, rank: int, size: int, experts: int, most_rows: int):
        self.ops, self.group, self.rank, self.size = ops, group, rank, size
        self.experts, self.most_rows = experts, most_rows

    def takes(self, rows: int, experts: Bank) -> bool:
        return 0 < rows <= self.most_rows and not self.ops.few(rows * self.size, experts)

    def mixture(
        self, x: Tensor, weights: Tensor, ids: Tensor, experts: Bank, physical: PhysicalExperts | None = None
    ) -> Tensor:
        """Rows of the first operator's result after those that came here are undefined, and so are the products by
        them; the second operator does not read them."""
        moe.check_ids(ids)
        ids = physical.of(ids) if physical else ids
        if experts.w13.order is not None:
            x = x.index_select(1, experts.w13.order)
        mode = SENT_IN_INT8 if moe.in_int8(experts) else 0
        rows, scales, assist, counts, received, _, _ = torch_npu.npu_moe_distribute_dispatch_v2(
            x=x,
            expert_ids=ids,
            group_ep=self.group,
            ep_world_size=self.size,
            ep_rank_id=self.rank,
            moe_expert_num=self.experts,
            scales=None,
            x_active_mask=None,
            expert_scales=None,
            elastic_info=None,
            group_tp="",
            tp_world_size=0,
            tp_rank_id=0,
            expert_shard_type=0,
            shared_expert_num=0,
            shared_expert_rank_num=0,
            quant_mode=mode,
            global_bs=0,
            expert_token_nums_type=COUNTS,
            comm_alg="",
            zero_expert_num=0,
            copy_expert_num=0,
            const_expert_num=0,
        )
        if physical:
            physical.rows.add_(counts)
        with self.ops.one_kernel(experts):
            y = moe.products(rows, scales, counts, COUNTS, experts, self.ops.can, x.dtype)
        self.ops.read_ahead(experts, y)
        return torch_npu.npu_moe_distribute_combine_v2(
            expand_x=y,
            expert_ids=ids,
            assist_info_for_combine=assist,
            ep_send_counts=received,
            expert_scales=weights.to(torch.float32),
            group_ep=self.group,
            ep_world_size=self.size,
            ep_rank_id=self.rank,
            moe_expert_num=self.experts,
            tp_send_counts=None,
            x_active_mask=None,
            expand_scales=None,
            shared_expert_x=None,
            elastic_info=None,
            ori_x=None,
            const_expert_alpha_1=None,
            const_expert_alpha_2=None,
            const_expert_v=None,
            group_tp="",
            tp_world_size=0,
            tp_rank_id=0,
            expert_shard_type=0,
            shared_expert_num=0,
            shared_expert_rank_num=0,
            global_bs=0,
            comm_quant_mode=0,
            comm_alg="",
            zero_expert_num=0,
            copy_expert_num=0,
            const_expert_num=0,
        )
