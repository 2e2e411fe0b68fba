"""Who asks for what and when: arrivals, lengths, sessions, classes of traffic, closed loops; `traces` of files."""
