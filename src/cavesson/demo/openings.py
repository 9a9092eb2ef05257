"""Everyday openings for a model to continue. None of them suggests how the text continues."""

TRAINING = (
    "The hotel room", "My flight yesterday", "The new coffee machine", "Our neighbours", "The bus this morning",
    "My first day at work", "The soup at the restaurant", "The film last night", "The phone I bought",
    "My brother's wedding", "The weather this weekend", "The library in our town", "My new shoes",
    "The meeting with my boss", "The train to the coast", "Our trip to the mountains", "The book on my desk",
    "The dentist", "The garden behind the house", "My old bicycle", "The concert on Friday", "The apartment we rented",
    "The waiter at the table", "My cooking class", "The parcel that arrived today", "The museum tour",
    "The bakery on the corner", "My laptop", "The swimming pool", "The taxi driver", "The school play",
    "My grandmother's kitchen", "The football match", "The customer service", "The beach in the evening",
    "My haircut", "The birthday party", "The dog next door", "The exam on Monday", "The view from the balcony",
    "The painter who came", "My piano lesson", "The market on Saturday", "The road to the lake", "The breakfast buffet",
    "The letter from the bank", "My gym", "The tent we slept in", "The doctor's appointment", "The new teacher",
    "The theatre tickets", "My morning walk", "The pizza we ordered", "The ferry ride", "The office kitchen",
    "The sofa in the living room", "My visit to the zoo", "The interview", "The winter in this city",
    "The plumber yesterday", "My cousin's new car", "The picnic in the park", "The shop assistant",
    "The language course",
)  # fmt: skip

HELD_OUT = (
    "The campsite", "My bus ride home", "The new washing machine", "Our landlord", "The ice cream shop",
    "My last holiday", "The lunch at the canteen", "The game we played", "The headphones I ordered",
    "My sister's graduation", "The traffic this morning", "The park near the station", "My winter coat",
    "The call with the insurance", "The boat trip", "Our evening in the old town", "The painting on the wall",
    "The optician", "The kitchen of our flat", "My running group", "The street festival", "The cabin by the river",
    "The bartender", "My dance lesson",
)  # fmt: skip
