"""Record timelines of graph replays, and draw the graph of a decoding round."""
