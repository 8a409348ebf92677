"""
Lesson 1: why (a + b) + c matters.

    uv run learn/lessons/1_order.py
"""

import math
import random
import struct


def float32(x):
    """x, rounded to the nearest number that float32 has."""
    return struct.unpack("f", struct.pack("f", x))[0]


def in_order(numbers, keep=float):
    """From left to right. Python's own sum() is no use here: since version 3.12 it corrects its rounding errors."""
    total = 0.0
    for x in numbers:
        total = keep(total + x)
    return total


def as_a_tree(numbers, keep=float):
    """Each half for itself, then the two halves."""
    if len(numbers) == 1:
        return numbers[0]
    half = len(numbers) // 2
    return keep(as_a_tree(numbers[:half], keep) + as_a_tree(numbers[half:], keep))


print("1. three numbers")
print("(0.1 + 0.2) + 0.3 =", (0.1 + 0.2) + 0.3)
print("0.1 + (0.2 + 0.3) =", 0.1 + (0.2 + 0.3))

print("\n2. eight numbers in float32: 1, and seven times 2^-24")
row = [1.0] + [2.0**-24] * 7
print("exact        ", math.fsum(row))
print("left to right", in_order(row, float32))
print("as a tree    ", as_a_tree(row, float32))

print("\n3. one token's logit is that sum, the other token's is 1.00000012")
other = float32(1.00000012)
print("greedy choice, left to right:", "the first token" if in_order(row, float32) > other else "the other token")
print("greedy choice, as a tree:    ", "the first token" if as_a_tree(row, float32) > other else "the other token")

print("\n4. a thousand numbers between -1 and 1, shuffled a thousand times")
rng, sums = random.Random(1), set()
numbers = [rng.random() * 2 - 1 for _ in range(1000)]
exact = math.fsum(numbers)
for _ in range(1000):
    rng.shuffle(numbers)
    sums.add(in_order(numbers))
print("different sums:", len(sums), " among them the exact one:", exact in sums)
print("the least and the largest:", min(sums), max(sums))

print("\n5. x -> 3.9 x (1 - x), the product taken in two orders")
x = y = 0.5
for step in range(1, 101):
    x, y = (3.9 * x) * (1 - x), 3.9 * (y * (1 - y))
    if step in (1, 5, 10, 40, 70, 100):
        print(f"step {step:3}: {x:.12f} {y:.12f}")
