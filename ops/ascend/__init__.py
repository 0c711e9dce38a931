"""The Ascend platform's ops: fused torch_npu calls on the device."""
