"""One engine: requests, sequences, batches and KV blocks, one step after another, and the record of them."""
