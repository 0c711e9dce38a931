"""Huawei Ascend: NPUs, HCCL, static graphs. Only device.py and graphs.py import torch_npu."""
