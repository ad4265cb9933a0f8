"""A few prompts of the six workloads' kinds, written for this project: enough to try things out.

Numbers to be compared with anyone's come from the public sets, given as files.
"""

from __future__ import annotations

SAMPLES: dict[str, tuple[str, ...]] = {
    "gsm8k": (
        "A farmer fills 14 crates with 24 apples each and sells 9 of the crates. How many apples "
        "does he have left?",
        "A train ticket costs 18 dollars and a child pays half. What do two adults and three "
        "children pay together?",
        "Lena saves 35 dollars a month. After how many months can she buy a bicycle for 280 "
        "dollars?",
        "A tank holds 240 litres. A pump moves 16 litres a minute. After 9 minutes, how many "
        "litres are missing until it is full?",
    ),
    "math500": (
        "Find all real numbers $x$ with $x^2 - 7x + 12 = 0$.",
        "What is the remainder when $7^{20}$ is divided by $5$?",
        "A circle has its centre at $(2,-1)$ and passes through $(5,3)$. What is its area?",
        "How many positive divisors does $360$ have?",
    ),
    "humaneval": (
        "Complete the following Python function. Answer with the whole function in one code "
        'block.\n\n```python\ndef longest_run(values: list[int]) -> int:\n    """Length of the '
        'longest run of equal neighbours; 0 for an empty list.\n    """\n```',
        "Complete the following Python function. Answer with the whole function in one code "
        'block.\n\n```python\ndef count_vowels(text: str) -> int:\n    """How many letters of the '
        'text are vowels, capitals too.\n    """\n```',
        "Complete the following Python function. Answer with the whole function in one code "
        'block.\n\n```python\ndef is_leap(year: int) -> bool:\n    """Whether the Gregorian year '
        'has 366 days.\n    """\n```',
    ),
    "mbpp": (
        "Write a Python function `merge` that merges two sorted lists into one sorted list. Your "
        "code should pass this test:\nassert merge([1, 4], [2, 3]) == [1, 2, 3, 4]",
        "Write a Python function `initials` that returns the first letters of the words of a "
        'name. Your code should pass this test:\nassert initials("ada lovelace") == "AL"',
        "Write a Python function `digits` that sums the digits of a positive integer. Your code "
        "should pass this test:\nassert digits(904) == 13",
    ),
    "mt-bench": (
        "Write a short letter to a neighbour, asking them to water your plants for two weeks.",
        "Explain to a ten-year-old why there are tides.",
        "You are a museum guide. Introduce visitors to a clay tablet from Ur.",
        "Compare renting and buying a flat. End with one question for the reader.",
    ),
    "alpaca": (
        "Name five vegetables that can be grown on a balcony.",
        "Rewrite the sentence in the passive voice.\n\nThe committee chose a new chair.",
        "Summarise what a library is good for in two sentences.",
        "Give three reasons to learn to swim.",
    ),
}
