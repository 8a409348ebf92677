"""
Exercise 6: a sum that does not know the ranks. The page beside this file says more.
"""

import torch


def tree_sum(parts):
    """The sum of parts (N, ..) over the first dimension, in the order of the page. `parts` may be overwritten."""
    raise NotImplementedError
