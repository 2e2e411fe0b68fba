"""Which requests are sent when: arrivals, lengths, sessions, traffic classes, closed loops; `traces`: recorded ones."""
