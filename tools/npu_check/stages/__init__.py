"""One module for each stage of tools/npu_check/stage.py; `checks()` returns its cases."""
