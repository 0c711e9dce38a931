"""Runs one rank of one case:  CASE_NAME=demo .venv/bin/python run.py [--set section.key=value ...]

`bash infer.sh CASE` starts all ranks of a case.
"""

from umbra.base.errors import run_main
from umbra.executor.rank_program import main

if __name__ == "__main__":
    run_main(main)
