"""The facts about Ascend that need none of its libraries."""

from umbra.executor.config.device import DeviceFacts
from umbra.executor.platform.ascend.settings import AscendSettings, HcclSettings

FACTS = DeviceFacts(
    platform="umbra.executor.platform.ascend.device:AscendPlatform",
    layout="umbra.ops.ascend.layout:AscendLayout",
    exe_modes=("eager", "ge_graph", "acl_graph", "npugraph_ex"),
    default_mode="ge_graph",
    page_size=128,
    quantised=("q4", "w8a8"),
    expert_slot="umbra.ops.ascend.vector_core.blocks:expert_slot",
    shadow_blocks="umbra.executor.platform.ascend.slot_store:npu_blocks",
    padding_states=True,
    spare_slots=1,  # the slot of zeros
    sections={"ascend_config": AscendSettings, "hccl_config": HcclSettings},
    rules="umbra.executor.platform.ascend.rules:check",
    memory_key="ascend_config.memory_gb",
    memory_plan="umbra.executor.platform.ascend.plan.memory:make_plan",
    counting="umbra.executor.platform.ascend.plan.memory:counting",
    layout_settings={"hccl_config.aiv_group": "none"},
    environment="umbra.executor.platform.ascend.environment:ascend_environment",
    plugin="torch_npu",
    runtime="CANN",
    lost_rank=r"ERR02\d{3} DIST",
    clear_graphs="umbra.executor.platform.ascend.compile_cache:clear_cache",
)
