"""Translation with a small Transformer, or with an LSTM encoder-decoder with attention."""
