"""Text to compare a model with its quantized copy on, if there is no evaluation data."""

_PROSE = """\
The bakery on the corner opens at six. By half past five the ovens are hot, the first loaves are
out, and two people are already waiting in the cold. One of them is a nurse on her way home from the
night shift; the other drives the first bus of the day. They have never been introduced, but they
talk about the weather, the price of butter, and the dog that sleeps in the doorway. When the light
goes on they step inside together, and each buys what they always buy. The baker does not need to
ask.
"""

_SCIENCE = """\
A glacier is a river of ice. Snow falls in winter and does not melt completely in summer, so each
year a new layer buries the old ones. Under the weight the lower layers turn into dense ice, and the
ice slowly flows downhill. It carries stones with it, some as large as houses, and grinds the rock
below into a fine powder. Where the climate warms, a glacier retreats: it still flows forward, but
its end melts faster than new ice arrives. The ridges of rubble that it leaves behind show how far
it once reached.
"""

_QUESTIONS = """\
Question: A train leaves at 9:40 and arrives at 12:15. How long does the trip take?
Answer: From 9:40 to 12:00 is 2 hours and 20 minutes. Another 15 minutes make 2 hours and 35
minutes.
Question: What is 17 times 6?
Answer: 17 times 6 is 102, because 10 times 6 is 60 and 7 times 6 is 42.
Question: Which is heavier, a kilogram of feathers or a kilogram of iron?
Answer: Neither. Both weigh one kilogram, although the feathers take up much more space.
"""

_CODE = """\
def mean(values):
    # the arithmetic mean of a list of numbers
    if not values:
        raise ValueError("mean of an empty list")
    return sum(values) / len(values)


def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


if __name__ == "__main__":
    print(mean([1, 2, 3, 10]), median([1, 2, 3, 10]))
"""

_CHAT = """\
User: My sourdough does not rise. What could be wrong?
Assistant: Most often the starter is not active enough. Feed it twice a day at room temperature
until it doubles within six hours. If it already does, check the temperature of the dough: below 20
°C it needs much longer. Very salty or very dry dough also rises slowly.
User: How do I know that it has risen enough?
Assistant: Press a finger into it. If the dent fills slowly and not completely, it is ready for the
oven.
"""

_OTHER = """\
{"room": "kitchen", "lights": [{"id": 1, "on": true, "level": 80}, {"id": 2, "on": false, \
"level": 0}], "temperature": 21.5}
Le train part à huit heures. Der Zug fährt um acht Uhr ab. El tren sale a las ocho.
Поезд отправляется в восемь часов. 电车八点出发。
"""

SAMPLE_TEXT = (_PROSE, _SCIENCE, _QUESTIONS, _CODE, _CHAT, _OTHER)
