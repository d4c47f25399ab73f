"""Calibration texts for int8: the ranges of activations are measured on them, on every worker alike.

They are of many kinds and lengths, because a range that no text reached here is cut off later. To change one of them
is to change the vectors of every int8 model, and so its fingerprint.
"""

from __future__ import annotations

CALIBRATION_TEXTS = (
    "Hello",
    "1",
    "?!",
    "red running shoes, size 42",
    "What is the capital of Australia?",
    "how to remove a stripped screw without a drill",
    "A dog jumps over a fallen tree at the edge of a lake.",
    "IMG_20190704_183012.jpg",
    "Quarterly results: revenue rose 12.4 % to $3.81 billion, net income fell to $214 million, or $0.52 per share.",
    "Return the absolute value of the argument.",
    "Open the file and return a stream. Raise OSError upon failure. The mode is an optional string that says how the "
    "file is opened; it defaults to 'r', which means open for reading in text mode. Other common values are 'w' for "
    "writing (truncating the file if it already exists), 'x' for creating and writing to a new file, and 'a' for "
    "appending, which on some Unix systems means that all writes append to the end of the file regardless of the "
    "current seek position. In text mode, if encoding is not specified the encoding used is platform dependent.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return total / "
    "len(values)",
    "SELECT customer_id, COUNT(*) AS orders FROM orders WHERE created_at >= '2021-01-01' GROUP BY customer_id;",
    "Usage: backup [OPTIONS] SOURCE TARGET\n\n  -r, --recursive   descend into folders\n  -n, --dry-run     say what "
    "would be done\n      --exclude X   leave out what matches X, may be given several times\n  -h, --help        show "
    "this text",
    "Traceback (most recent call last): ValueError: could not convert string to float: 'n/a'",
    "https://example.org/docs/v2/index.html?lang=en&page=17#install",
    '{"id": 7311, "name": "Lamp, desk", "price": {"amount": 24.9, "currency": "EUR"}, "tags": ["home", "light"]}',
    "Preheat the oven to 180 degrees. Whisk the eggs with the sugar until pale, fold in the flour and the melted "
    "butter, and pour the batter into a greased tin. Bake for 35 minutes, or until a skewer comes out clean. Let it "
    "cool before you take it out, and dust it with icing sugar.",
    "The French Revolution was a period of political and societal change in France which began with the Estates "
    "General of 1789 and ended with the Coup of 18 Brumaire in 1799. Many of its ideas are considered fundamental "
    "principles of liberal democracy, while its values and institutions remain central to modern political discourse.",
    "Photosynthesis converts light energy into chemical energy. In plants, algae and cyanobacteria it uses water and "
    "carbon dioxide, and releases oxygen. The light reactions take place in the thylakoid membranes, where chlorophyll "
    "absorbs photons and an electron transport chain produces ATP and NADPH; these drive the Calvin cycle in the "
    "stroma, which fixes carbon dioxide into sugars. The rate depends on light intensity, the concentration of carbon "
    "dioxide, temperature and water. Plants of dry places have found other ways to take in carbon dioxide: some of "
    "them open their stomata only at night, and store it as an acid until the morning comes.",
    "The patient, a 54-year-old woman with a history of type 2 diabetes and hypertension, presented with acute chest "
    "pain radiating to the left arm. ECG showed ST elevation in leads II, III and aVF. Troponin was 3.2 ng/mL.",
    "Subject to the terms and conditions of this License, each Contributor hereby grants to You a perpetual, "
    "worldwide, non-exclusive, no-charge, royalty-free, irrevocable copyright license to reproduce, prepare derivative "
    "works of, publicly display, publicly perform, sublicense, and distribute the Work.",
    "We study the convergence of stochastic gradient descent for non-convex functions whose gradients are only Hölder "
    "continuous, and show a rate of O(n^{-1/3}) under an assumption on the variance that is weaker than those of "
    "earlier work. Experiments on three data sets agree with the theory.",
    "lol no way!!! u really did that?? 😂😂 ok see u tmrw then, bring snacks",
    "Great product, arrived on time. The zip broke after two weeks though, and nobody answers my e-mails. Two stars.",
    "Dear Ms. Novak, thank you for your letter of 3 March. We regret that your order was delayed, and have asked our "
    "carrier for an explanation. You will have the parts by Friday at the latest. Yours sincerely, J. Peters",
    "BREAKING: Magnitude 6.8 earthquake strikes off the coast; tsunami warning issued, no casualties reported so far",
    "It was late in the evening when the old man came down from the hill. The road was empty, the shops were shut, and "
    "a thin rain had begun to fall, so that the lamps along the harbour had rings around them. He stopped at the third "
    "door and listened. Somebody inside was playing the same four bars on a piano, over and over, always going wrong "
    "at the same note. He smiled, took off his hat, shook the water from it, and knocked twice. The music broke off. "
    "For a while nothing happened; then there were steps, and a chain, and a voice that he had not heard for thirty "
    "years asked who was there. He had thought about his answer all the way across the sea, on the ship and on the "
    "train and in the rooms of cheap hotels, and had learnt it by heart, and now he could not remember a word of it.",
    "Chapter 4. Installation .......... 31\n4.1 Requirements .......... 31\n4.2 From packages .......... 32\n4.3 From "
    "source .......... 35\n4.4 Trouble .......... 38",
    "x = (-b ± √(b² − 4ac)) / 2a, where a ≠ 0",
    "GATTACAGATTACACCGGTTAACCGGTTTTAACG",
    "Die Bundesregierung hat am Mittwoch beschlossen, den Ausbau der Schienenwege zwischen den großen Städten mit "
    "weiteren drei Milliarden Euro zu fördern.",
    "Le chat dort sur le canapé pendant que la pluie tombe sur les toits de la vieille ville.",
    "¿Dónde puedo comprar un billete de tren para mañana por la mañana?",
    "Москва является крупнейшим по численности населения городом России и одним из крупнейших городов Европы.",
    "机器学习是人工智能的一个分支,它使计算机能够从数据中学习。",
    "東京は日本の首都であり、世界で最も人口の多い都市圏の一つです。",
    "القاهرة هي عاصمة مصر وأكبر مدنها من حيث عدد السكان.",
    "भारत दुनिया का सबसे अधिक जनसंख्या वाला देश है।",
)
"""Their order counts as well: they are measured in groups."""
