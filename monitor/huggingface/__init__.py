"""Hugging Face: Driftpoint in the Trainer and in Accelerate.

    callback     what a Trainer is given: attaches, resumes and steps at the Trainer's events
    progress     what of the Trainer's own a commit holds
    state_text   the Trainer's state as text, quickly however long its history
    exported     the state of the Trainer's other callbacks
    resuming     what ``trainer.train`` is given: where the Trainer goes on
    folder       the folder that stands for a checkpoint of the Trainer's
    guard        keeps a Trainer without the callback from that folder
    accelerator  what an Accelerator has prepared, for monitor.attach
    deepspeed_engine   the engine behind a Trainer's model, and its own load, which there is nothing for

transformers is imported only here, and only when one of these is asked for.
"""
