"""Prompts of the losslessness test, in our own words: chat, maths, code, raw continuations.

They differ in length (2 to some 600 tokens), in script and in how predictable the answer is, since
a verify step can go wrong at a page's edge, at a rejected first draft, or at a full acceptance.
"""

from __future__ import annotations

CHAT = (
    "What is the capital of Portugal, and which river does it lie on?",
    "Explain to a child why the sky is blue.",
    "Write a short letter to a landlord about a dripping kitchen tap.",
    "Name three differences between a frog and a toad.",
    "My train was cancelled. Give me two polite sentences to ask for a refund.",
    "Describe the smell of rain on dry ground.",
    "Which is heavier, a litre of oil or a litre of water? Why?",
    "Suggest a week of simple suppers for two people who do not eat meat.",
    "Summarise the story of the tortoise and the hare in four sentences.",
    "Give me five names for a grey cat, each with a reason.",
    "How do I sharpen a kitchen knife with a whetstone?",
    "Translate into French: the library opens at nine and closes at six.",
    "What should one pack for three days of walking in the hills in October?",
    "Tell me a joke about two mathematicians and a lift.",
)
MATHS = (
    "A baker makes 12 trays of 18 rolls and sells 155 rolls. How many are left?",
    "Compute 17 * 23 step by step.",
    "A rectangle is 7 cm wide and has an area of 91 square cm. What is its perimeter?",
    "What is the sum of the whole numbers from 1 to 40?",
    "If a car uses 6 litres for 100 km, how much does it use for 350 km?",
    "Solve 3x + 11 = 2x + 29 for x and check the answer.",
    "Three friends share 84 marbles in the ratio 1 : 2 : 4. How many does each get?",
    "Is 221 a prime number? Show your work.",
    "Convert 98.6 degrees Fahrenheit to Celsius.",
    "A die is thrown twice. How likely is it that both throws are even?",
)
CODE = (
    "Write a Python function that tells whether a string is a palindrome.",
    "Write a Python function that returns the n-th Fibonacci number with a loop.",
    "Write a shell command that counts the lines of all .txt files in a folder.",
    "Show a SQL query that lists the ten customers with the most orders.",
    "Write a JavaScript function that removes duplicates from an array.",
    "Explain what this does: [x * x for x in range(10) if x % 2]",
    "Write a Python class for a stack with push, pop and peek.",
    "Write HTML for a table with two columns, name and age, and two rows.",
)
RAW = (
    "Once upon a time, in a village by the sea,",
    "def add(a, b):\n    return",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "The",
    "import os\nimport sys\n\n\ndef main():\n",
    "aaaaaaaaaaaaaaaa",
    "Zürich, Łódź, Αθήνα, 東京: ",
    "To be, or not to be, that is",
)
_PARAGRAPH = (
    "The ferry left at dawn and the harbour grew small behind us. On deck the crew coiled ropes, "
    "and an old man fed crumbs of bread to the gulls that followed the ship. "
)
LONG = (
    _PARAGRAPH * 4 + "\nWhat did the old man do?",
    "\n".join(f"{i}. item number {i} costs {3 * i} euros" for i in range(1, 31)) + "\n31. item",
)


def chat_template(turn: str) -> str:
    """One user turn in the demo target's chat format (ChatML)."""
    return f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS = (*(chat_template(turn) for turn in (*CHAT, *MATHS, *CODE)), *RAW, *LONG)
