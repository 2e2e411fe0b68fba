"""Why each request was slow: every nanosecond of its life in one part, its story, causes of misses, what-if."""
