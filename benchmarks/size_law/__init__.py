"""A law of size: what each scheme costs by size. research/size-law.md has the rules."""
