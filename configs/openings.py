"""What a drafter's conversations start from: the kinds of request it will meet, each with many first words.

`open` texts are only begun: the target goes on as the user, so that no two requests are the same. In braces stand pools,
here or given by a config from files (`{document}`, `{german}`); `{n}` is a whole number from 2 to 99.
"""

from specdec_jax.distillation.prompts import Openings

POOLS: dict[str, tuple[str, ...]] = {
    "name": tuple(
        "Anna Ben Carla David Elena Farid Grace Hugo Ines Jack Kim Leo Maria Noah Olga Paul Rosa Sam Tara Victor Wendy "
        "Yusuf Zoe Marta Peter Lucy Tom Emma James Sarah Mike Nina Omar Priya Quinn Ravi Sofia Tim Uma Walter".split()
    ),
    "thing": tuple(
        "apples|books|pencils|tickets|cookies|stamps|marbles|bottles of juice|chairs|eggs|postcards|tomatoes|candles|boxes|"
        "bags of flour|plants|shirts|bricks|sandwiches|coins|pages|flowers|toys|cups|kilometres|hours|litres of milk|"
        "pounds of rice|fish|photos|cakes|pizzas|notebooks|dollars|games|oranges|chickens|miles|seats|lamps".split("|")
    ),
    "topic": tuple(
        "climate change|the French Revolution|machine learning|healthy breakfasts|the moon|public transport|jazz|bees|"
        "inflation|vaccines|chess openings|volcanoes|black holes|home gardening|the Roman Empire|electric cars|sleep|coffee|"
        "remote work|coral reefs|poetry|the stock market|photosynthesis|dinosaurs|the Olympic Games|social media|robots|"
        "democracy|evolution|pottery|football|the Silk Road|solar energy|dreams|bread|the internet|DNA|elections|taxes|"
        "the human heart|earthquakes|Shakespeare|tourism|cybersecurity|marathon training|recycling|museums|quantum physics|"
        "the water cycle|mental health|ancient Egypt|Python programming|travelling by train|renewable energy|astronomy|"
        "a haunted house|friendship|a lost dog|a small village|a new teacher|the first day of winter|an old violin".split("|")
    ),
    "place": tuple(
        "Paris|Japan|a small town|Brazil|the desert|Berlin|an island|Canada|the mountains|India|New York|Kenya|a library|"
        "Australia|the seaside|Mexico|Rome|a farm|Norway|London|California|China|Spain|a hospital|Texas".split("|")
    ),
    "person": tuple(
        "a doctor|a pirate captain|a detective|a travel guide|a history teacher|a chef|an astronaut|a football coach|a poet|"
        "a lawyer|a robot from the future|a gardener|a famous scientist|a shopkeeper|a personal trainer".split("|")
    ),
    "german_start": tuple(
        "Der|Die|Das|Ein|Eine|In|Im|Am|Mit|Nach|Wir|Sie|Er|Es|Ich|Man|Auf|Bei|Für|Wenn|Als|Aber|Auch|Doch|Seit|Nur|Zum|"
        "Die Regierung|Der Präsident|Die Polizei|In Deutschland|Im vergangenen Jahr|Nach Angaben|Laut|Die meisten|Viele|"
        "Das Unternehmen|Der Minister|Die Stadt|Am Montag|Die Europäische Union|Einige|Der Verein|Die Zahl der|Es ist|"
        "Das ist|Wir haben|Ich habe|Der Mann|Die Frau|Die Kinder|Bei einem|Durch die|Trotz|Während|Vor allem|Die Firma".split("|")
    ),
}

OPENINGS = (
    Openings("chat", weight=1.0, open=True, turn_limit=110, texts=("",)),
    Openings(
        "chat",
        weight=0.9,
        open=True,
        turn_limit=110,
        texts=(
            "How can I", "What are the", "Can you explain", "Explain", "Why", "How do", "Give me", "I am", "I want to",
            "What is the difference between", "Tell me about {topic}", "Describe", "Imagine you are {person}.",
            "Pretend to be {person}.", "You are {person}.", "Write a Python function", "Write a program that", "How does",
            "Compare", "List", "Suggest", "Help me", "Discuss", "What would happen if", "Provide", "Design", "Implement",
            "Read the following text and", "Extract", "Classify", "Rewrite", "Which of the following", "Given",
            "What are some tips for", "Evaluate the following", "Identify", "Create", "Develop", "Analyze", "Fix the",
            "Explain {topic} to", "What do you know about {topic}", "How is {topic} related to {topic}", "Outline",
        ),
    ),
    Openings(
        "writing",
        weight=0.8,
        open=True,
        turn_limit=90,
        texts=(
            "Write a story about {topic}", "Write a blog post about {topic}", "Write an email to", "Write a letter to",
            "Write a poem about {topic}", "Compose a", "Write a short", "Draft a", "Write a product description for",
            "Write the first paragraph of", "Write a speech", "Write a news article about {topic}", "Write a review of",
            "Write a dialogue between {person} and {person}", "Write an essay about {topic}", "Write a description of {place}",
            "Invent", "Write a funny", "Write an advertisement for", "Write a diary entry", "Write a report on {topic}",
        ),
    ),
    Openings(
        "question",
        weight=1.5,
        open=True,
        turn_limit=40,
        texts=(
            "Who", "When", "Where", "What", "Which", "Who was the first", "Who played", "Who sings", "Who wrote",
            "When was", "When did the", "When does", "When is the", "Where is the", "Where was", "Where did", "Where does",
            "What is the name of", "What does", "What is the", "What year did", "What was the", "What kind of", "Which country",
            "How many", "How long", "How old", "How much", "How tall", "Why did", "Why is the", "Is", "Did", "Was", "Who is the",
            "Who won the", "Who plays", "Who invented", "Who discovered", "The first", "What are the", "In which", "Name the",
            "Who has the most", "What type of", "Where do", "Where can", "When do", "What happened to", "Who owns",
        ),
    ),
    Openings(
        "math",
        weight=1.3,
        open=True,
        turn_limit=110,
        texts=(
            "{name} has {n} {thing}", "{name} buys {n} {thing}", "{name} and {name}", "A farmer", "A shop sells {n}",
            "There are {n} {thing}", "{name} bought {n}", "In a class of {n}", "{name} wants to", "A train", "If {n} {thing}",
            "{name} is {n} years old", "A box contains {n} {thing}", "{name} earns ${n}", "It takes {name} {n}", "Every day",
            "{name} has twice as many {thing} as {name}", "{name} makes {n} {thing}", "A company", "The price of", "Each",
            "{name} spends {n}", "At the store, {name}", "A recipe", "{name} runs {n}", "{name} read {n} pages", "A bus",
            "{n} percent of", "{name} sold {n} {thing}", "The perimeter of", "What is the probability", "Solve", "Find",
            "{name} collects", "{name} had ${n}", "A tank holds {n}", "{name}'s", "Two", "During", "On Monday, {name}",
        ),
    ),
    Openings(
        "math",
        weight=0.4,
        texts=(
            "{name} has {n} {thing} and gives {name} {n} of them. Then {name} buys {n} more. How many does {name} have now?",
            "A shop sells {n} {thing} a day at ${n} each. How much does it earn in {n} days? Work it out step by step.",
            "{name} reads {n} pages a day for {n} days. The book has {n}00 pages. How many pages are left?",
            "There are {n} rows with {n} {thing} each. {n}% of them are sold. How many are left?",
            "{name} is {n} years old and {name} is twice as old. How old will they be together in {n} years?",
            "A car drives {n} km in the first hour and {n} km in the second. What is its average speed?",
            "{name} earns ${n} an hour and works {n} hours a week. How much does {name} earn in {n} weeks?",
            "{name} bought {n} {thing} for ${n} each and paid with a $1000 note. How much change does {name} get?",
            "If {n} workers need {n} hours for a job, how long do {n} workers need? Explain your steps.",
            "{name} divides {n}0 {thing} equally among {n} friends. How many does each get, and how many are left over?",
        ),
    ),
    Openings(
        "translation",
        weight=1.6,
        texts=(
            "Translate German to English: {german}",
            "Translate German to English: {german}",
            "Translate German to English: {german}",
            "Translate from German to English: {german}",
            "Translate this German text into English: {german}",
            "Translate to English.\n\n{german}",
            "Translate the German text below to English.\n\n{german}",
            "What does this mean in English? {german}",
            "{german}\n\nTranslate this to English.",
        ),
    ),
    Openings(
        "translation",
        weight=0.7,
        open=True,
        turn_limit=60,
        texts=(
            "Translate German to English: {german_start}",
            "Translate German to English: {german_start}",
            "Translate German to English: {german}",
            "Translate the German text to English.\n\n{german_start}",
            "Translate from German to English: {german}",
        ),
    ),
    Openings(
        "summary",
        weight=1.0,
        long=True,
        texts=(
            "Summarize: {document}", "Summarize: {document}", "Summarize: {document}", "Summarize the text: {document}",
            "Summarise this in two sentences.\n\n{document}", "Give a short summary of the text below.\n\n{document}",
            "{document}\n\nSummarize the text above.", "What is the main point of this text?\n\n{document}", "TL;DR: {document}",
            "Summarize the article in a few sentences:\n\n{document}",
        ),
    ),  # fmt: skip
    Openings(
        "summary",
        weight=0.5,
        long=True,
        open=True,
        turn_limit=260,
        texts=("Summarize: {beginning}", "Summarize: {beginning}", "Summarize this article.\n\n{beginning}"),
    ),
    Openings(
        "retrieval",
        weight=1.4,
        long=True,
        open=True,
        turn_limit=40,
        texts=tuple(
            "{document}\n" + word
            for word in ("What", "Who", "When", "Where", "How many", "Why", "Which", "How", "What is the", "Who was",
                         "When did", "Where is", "What was the", "Who is the", "In what", "Describe the", "What are the")
        ),
    ),  # fmt: skip
)
