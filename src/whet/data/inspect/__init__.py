"""Facts, statistics and problems of the data of a run, for `whet data`."""
