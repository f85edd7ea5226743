"""Makes universal checkpoints with DeepSpeed's own converter, many in one process, for the time it takes to start.

Usage: source_convert.py INPUT OUTPUT [INPUT OUTPUT]... — as the converter's --input_folder and --output_folder.
"""

from __future__ import annotations

import sys
from argparse import Namespace

from deepspeed.checkpoint.ds_to_universal import main

if __name__ == "__main__":
    for source, target in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(
            Namespace(
                input_folder=source,
                output_folder=target,
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
