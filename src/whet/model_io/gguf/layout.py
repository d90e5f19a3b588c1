"""Constants of the GGUF format."""

# the numeric types of metadata values as struct format characters, and the two other types
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ALIGNMENT = 32  # of every tensor, unless the metadata has another value
