"""DeepSpeed's own converter, killed when it has written so many of the parameters' files.

Usage: source_convert_killed.py INPUT OUTPUT FILES — it ends with code 9.
"""

from __future__ import annotations

import itertools
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.ds_to_universal import main

if __name__ == "__main__":
    source, target = sys.argv[1], Path(sys.argv[2])
    save, written = torch.save, itertools.count(1)

    def counted(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        save(value, file, *args, **kwargs)
        if (target / "zero") in Path(file).parents and next(written) == int(sys.argv[3]):
            os._exit(9)

    torch.save = counted
    main(
        Namespace(
            input_folder=source,
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
