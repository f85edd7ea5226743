"""Integrate with the Hugging Face Trainer and Accelerate. transformers is imported only in this package."""
