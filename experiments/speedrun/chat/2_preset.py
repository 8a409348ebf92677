"""
What config/smollm2.py does: GRPO, one update of each batch of 64 samples.
"""

max_steps = 12
