"""ratios"""
