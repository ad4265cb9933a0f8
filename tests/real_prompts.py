"""Thirty-two prompts as people write them, to run the real model on."""

from __future__ import annotations

QUESTIONS = (
    "What is the capital of Australia, and why was it chosen?",
    "Explain how a bicycle stays upright while it is moving.",
    "Write a short poem about the sea in winter.",
    "List five uses of baking soda in the kitchen.",
    "A train travels 120 km in 90 minutes. What is its average speed in km/h?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Summarise the story of Romeo and Juliet in three sentences.",
    "What is the difference between a virus and a bacterium?",
    "Translate into French: Where is the nearest railway station?",
    "Give me a recipe for pancakes for two people.",
    "Why is the sky blue during the day and red at sunset?",
    "Tom has 3 boxes with 12 apples each and gives away 10 apples. How many are left?",
    "Describe the water cycle for a ten-year-old.",
    "Write an email to my landlord about a broken heater.",
    "Name the planets of the solar system in order from the sun.",
    "What are the advantages and disadvantages of working from home?",
    "Write a haiku about a cat on a windowsill.",
    "Explain what a hash table is and when to use one.",
    "Who wrote The Origin of Species, and what is it about?",
    "How do I remove a coffee stain from a white shirt?",
    "Write a SQL query that counts the orders of each customer.",
    "What is photosynthesis?",
    "Give three tips for a job interview.",
    "Continue the story: The door opened, and there stood a very small dragon.",
    "What is 17 times 23? Show your steps.",
    "Explain the rules of chess in a few sentences.",
    "Write a product description for a wooden desk lamp.",
    "What causes the seasons on Earth?",
    "Rewrite politely: Send me the report now.",
    "Suggest a name and a slogan for a small bakery.",
    "How does a refrigerator keep food cold?",
    "Write a function in JavaScript that reverses a string.",
)

CHATS = tuple([{"role": "user", "content": question}] for question in QUESTIONS)
