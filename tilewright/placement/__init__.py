"""Which of several unlike devices does what: one model of cost, and a schedule for stages that depend on each other."""
