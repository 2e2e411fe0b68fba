"""Extensions of batchsim, which a scenario names as it names shipped ones."""
