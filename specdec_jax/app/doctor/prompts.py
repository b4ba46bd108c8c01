"""What a pair is asked where nobody says: eight short prompts, each of another kind, since acceptance goes by kind."""

PROMPTS = (
    "Why do leaves turn red and yellow in autumn? Explain it to a ten-year-old.",
    "Write a Python function that returns the second largest number of a list, with a docstring.",
    "A train leaves at 9:40, arrives at 13:05 and stands still for 25 minutes on the way. For how long does it move? "
    "Work it out step by step.",
    "Translate the following German text to English.\n\nAm Abend ging der Gärtner noch einmal durch den Park, schloss "
    "das Tor und stellte die leeren Gießkannen neben den Brunnen.",
    "Summarise the following text in one sentence.\n\nThe island's only bakery closed in March. Since then the ferry "
    "brings bread three times a week, and whoever wants rolls on a Sunday has to order them by Thursday. Two brothers "
    "from the mainland have now asked for the keys to the old bakehouse.",
    'Repeat this text word for word: "The museum opens at ten and closes at six. On the first Monday of a month it '
    'stays closed."',
    "Write the first paragraph of a story about a clock that runs backwards.",
    "List three things to check before a long bicycle tour, with one sentence about each.",
)
