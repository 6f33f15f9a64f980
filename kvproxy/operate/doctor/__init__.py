"""What is wrong with a setup, asked of the engines and of LMCache themselves, with the fix for each finding."""
